"""Takes the version from the workspace's Cargo.toml, or, in an unpacked source distribution, from its PKG-INFO."""

import tomllib
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup


def read_version() -> str:
    here = Path(__file__).resolve().parent
    manifest = here.parent / "Cargo.toml"
    if manifest.is_file():
        return str(tomllib.loads(manifest.read_text())["workspace"]["package"]["version"])
    return HeaderParser().parsestr((here / "PKG-INFO").read_text())["Version"]


setup(version=read_version())
