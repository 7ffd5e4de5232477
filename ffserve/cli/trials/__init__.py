"""Commands that try ffserve out: a demonstration, a measurement, a simulation."""
