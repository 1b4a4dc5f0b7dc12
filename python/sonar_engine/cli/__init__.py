"""The command `sonar`: serve, generate, chat, verify, bench, models."""

from sonar_engine.cli.app import main

__all__ = ["main"]
