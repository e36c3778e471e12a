"""What is much and what is little: each threshold once, with its unit, reason and source."""

# --- The link ----------------------------------------------------------------------------------

# TCP that sends this part of its segments again is slow for it: its rate falls with the root of
# the loss (Mathis et al., Computer Communication Review 27(3), 1997). A sound cable loses none,
# but a virtual one between two busy processes has repeated 0.014 of them at 7 Gb/s: it counts
# only where the link is not HEALTHY.
LOSSY = 0.01
# These rise on sound links too: frames of protocols that nobody listens to, waiting for credit.
HARMLESS = ("rx_dropped", "port_xmit_wait")
# An interface that carried less than this part of what the all-reduces moved was not the link:
# other traffic of the node, or the few messages by which the ranks find each other.
STRAY = 0.01
HEALTHY = 0.5  # a link below this part of its stated speed is not the link that was meant
DELIVERS = 0.8  # above it, headers and start-up account for the rest
# Gb/s: to this an Ethernet port falls back where only two pairs of its cable are good.
FALLEN_PORT_GBPS = 0.1
SAME_RATE = 1.2  # rates within this factor can be those of one wire
# One TCP connection is bound by one core, which from here on (Gb/s) may not fill the link.
FAST_SOCKETS_GBPS = 25

# --- A step ------------------------------------------------------------------------------------

RANGE_TOLERANCE = 0.10  # measured times this far outside the model's range still count as inside
LINK_FREE_SHARE = 0.10  # an all-reduce below this part of a step cannot be what bounds it
EXPOSED_IN_PART = 0.2  # above this part of a step, exposed communication bounds it in part
STRAGGLER = 1.2  # a rank this many times as busy as the usual one keeps the others waiting
# A training step of ResNet-18 at 224 px in fp32 on an RTX 2080 Ti runs at 750 img/s or more; a GPU
# that gets a quarter of that is most likely waiting for images.
SLOW_GPU_IMG_PER_S = 190

# --- Two runs ----------------------------------------------------------------------------------

LOSS_TOLERANCE = 0.03  # rounding differs between runs; data order and seed do not have to
