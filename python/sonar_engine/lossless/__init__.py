"""Whether speculation changes what is generated: the same prompts with it off and on, compared. For `sonar verify`."""
