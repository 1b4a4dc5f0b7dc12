"""Structured output: forms that a request's text must have, as token masks at every verified position."""
