"""What developers measure beyond `ffserve bench`: every row of docs/BENCHMARKS.md, the comparison
with recorded ratios, and the picture."""
