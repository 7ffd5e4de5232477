"""Prepared samples: the session that prepares each one, and its way into shared memory."""
