"""From an array to a small summary that merges by sums and maxima."""
