"""A module whose import takes long, for the fork server of a node."""

import time

time.sleep(4)
