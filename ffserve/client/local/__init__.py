"""Samples that this process reads by itself: from local files, or by ranges of remote ones."""
