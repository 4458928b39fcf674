"""The product's version and how its build side is installed: alone, so that every room may ask for it."""

__version__ = "0.1.0"
DISTRIBUTION = "compress-models"
"""What package indexes call it: they have another `compress`."""
BUILD_SIDE = (
    f"pip install '{DISTRIBUTION}[build]' installs the build side (without a GPU add --extra-index-url "
    "https://download.pytorch.org/whl/cpu: 1.8 GB instead of 6.3)"
)
