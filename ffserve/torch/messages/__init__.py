"""Batches on their way from the processes of workers to the training process."""
