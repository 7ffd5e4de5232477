"""Version of the package; pyproject.toml has the same number."""

BUILD = ""
"""Date and commit of a build, such as "+20261128.g24327da", which engine/build_core.py writes into
the build; empty in a source tree."""
__version__ = "0.1.0" + BUILD
