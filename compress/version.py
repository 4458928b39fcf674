"""The product's version and how its build side is installed: alone, so that every room may ask for it."""

__version__ = "0.1.0"
BUILD_SIDE = "pip install '.[build]' in the project's folder installs the build side"
