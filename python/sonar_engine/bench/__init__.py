"""What `sonar bench` measures: the scheduler alone, one stream, many streams."""
