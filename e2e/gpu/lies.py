"""Violations of the MPS handshake, as values of `cleave-client --lie`."""
# `shutdown-channel` is missing, because the real server gives its clients pipes.
_HALVES = ("shutdown", "shutdown-reading", "shutdown-writing", "shutdown-daemon")
LIES = [
    *(f"{half}={step}" for half in _HALVES for step in range(6)),
    *(f"vanish={words}" for words in range(4)), *(f"mute={words}" for words in range(4)),
    "stall=9", "stall=13", "garbage", "huge", "twice", "descriptors", "unread", "no-last-word", "last-word=7",
    "administrator-after-client", "long-command", "flood=200", "enter=64",
]
