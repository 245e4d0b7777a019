"""The installed version of Proofline."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("proofline")
except PackageNotFoundError:  # run from a checkout without an install
    VERSION = "0+unknown"
