"""How many orders of magnitude values span: counts by the top bits of their float32 pattern, which merge by addition.

A bucket is an exponent and the first three bits of a mantissa, so that all of float32 takes 2,048 of them and the
middle of a bucket is within 6.25 % (0.027 decades) of every value in it.
"""

SHIFT = 20  # bits of a positive float32 that a bucket leaves out
SIZE = 2 ** (31 - SHIFT)
ERROR = 1 / 16
QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
