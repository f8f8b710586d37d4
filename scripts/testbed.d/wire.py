# SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
"""Frames of tests/testbed/frame.h, and how the bed's files are reached."""
import os
import socket
import struct

HEADER = struct.Struct("<III")
PAYLOAD_MAX = 65536
CREDIT = 262144

OPEN, STDIN, KILL, CLOSE = 1, 2, 3, 4
STDOUT, STDERR, EXIT, READY = 16, 17, 18, 19
CREDIT_MORE = 32

# Exit statuses of `testbed` itself; a command's own pass through.
STATUS_FAILED = 125   # the testbed, not the command
STATUS_TIMEOUT = 124


def frame(channel, kind, payload=b""):
    return HEADER.pack(channel, kind, len(payload)) + payload


def frame_u32(channel, kind, value):
    return frame(channel, kind, struct.pack("<I", value))


def split(buffer):
    """Takes whole frames off a bytearray; yields (channel, type, payload)."""
    at = 0
    while len(buffer) - at >= HEADER.size:
        channel, kind, length = HEADER.unpack_from(buffer, at)
        if length > PAYLOAD_MAX:
            raise ValueError(f"frame of {length} bytes")
        if len(buffer) - at - HEADER.size < length:
            break
        start = at + HEADER.size
        yield channel, kind, bytes(buffer[start:start + length])
        at = start + length
    del buffer[:at]


def connect(folder, name, timeout=10):
    """Connects to a UNIX socket in a folder whose path may be longer than 107 bytes."""
    d = os.open(folder, os.O_PATH)
    try:
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(timeout)
        s.connect(f"/proc/self/fd/{d}/{name}")
        return s
    finally:
        os.close(d)
