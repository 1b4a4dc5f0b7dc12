"""`python -m sonar_engine.cli`, for launchers that start modules."""

from sonar_engine.cli import main

main()
