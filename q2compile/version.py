"""The version alone, so that whoever writes it down needs nothing else of the package."""

__version__ = "0.1.0"
