"""Numbers of the random choices made about a sample: a key and one of these give a fresh random word.

A number is never given a second meaning, since what a run drew must stay as it was. A user's own choices take 1,000 and
above.
"""

STREAM_FLIP, STREAM_DOWN, STREAM_RIGHT = 1, 2, 3
STREAM_CROP_PLACE = 4
STREAM_CUTOUT = 5
STREAM_ERASE, STREAM_ERASE_PLACE, STREAM_ERASE_NOISE = 6, 7, 8
STREAM_BRIGHTNESS, STREAM_CONTRAST, STREAM_SATURATION = 9, 10, 11
STREAM_PARTNER, STREAM_MIX, STREAM_CUTMIX_PLACE = 12, 13, 14
STREAM_BETA = 15
"""And the next one: a beta variate is made of two words."""
STREAM_CROP = 100
"""And one more for each attempt after the first; up to 99 attempts."""
STREAM_ERASE_SIDES = 200
"""As STREAM_CROP."""
STREAM_OPERATION, STREAM_LEVEL, STREAM_SIGN = 300, 400, 500
"""Of a policy: and one more for each round after the first; up to 99 rounds."""
