"""Stream numbers: a sample's key and one of these numbers give an independent random word.

A number never changes its meaning, so that runs stay reproducible. Numbers from 1,000 on are for users.
"""

STREAM_FLIP, STREAM_DOWN, STREAM_RIGHT = 1, 2, 3
STREAM_CROP_PLACE = 4
STREAM_CUTOUT = 5
STREAM_ERASE, STREAM_ERASE_PLACE, STREAM_ERASE_NOISE = 6, 7, 8
STREAM_BRIGHTNESS, STREAM_CONTRAST, STREAM_SATURATION = 9, 10, 11
STREAM_PARTNER, STREAM_MIX, STREAM_CUTMIX_PLACE = 12, 13, 14
# A beta variate takes two words: this stream and the next one, 16.
STREAM_BETA = 15
STREAM_VERTICAL_FLIP, STREAM_HUE = 17, 18
STREAM_ROTATION, STREAM_IS_ROTATED = 19, 20
# One of AutoAugment's 25 pairs of operations.
STREAM_SUB_POLICY = 21
# First attempt of a random crop. Each further attempt takes the next stream; at most 99 attempts.
STREAM_CROP = 100
# First attempt of random erasing; further attempts as for STREAM_CROP.
STREAM_ERASE_SIDES = 200
# First round of a policy. Each further round takes the next stream; at most 99 rounds.
STREAM_OPERATION, STREAM_LEVEL, STREAM_SIGN, STREAM_IS_APPLIED = 300, 400, 500, 600
