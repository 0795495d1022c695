"""The shares of Redis's memory that clients may use, so that all else has its place.

Everything else in Redis is bounded by the numbers of keys, workers and gateways: some ten MB.
Scripts ask Redis for its `maxmemory` whenever they write, so that a change counts at once.
"""

from __future__ import annotations

KEPT = 0.25
"""Of kept responses and conversations, which may be as large as clients like."""
CLAIMS = 0.1
"""Of prefix claims; a lost one costs one prompt that is read again."""
FREE = 0.1
"""Kept responses give way where less is left, whoever fills Redis."""
_ASSUMED_BYTES = 64 * 1024 * 1024
"""If Redis does not report its `maxmemory`, as other servers with its protocol may not."""

MEMORY = f"""
local info = redis.call('INFO', 'memory')
local used = tonumber(string.match(info, 'used_memory:(%d+)') or '0')
local maxmemory = tonumber(string.match(info, 'maxmemory:(%d+)') or '{_ASSUMED_BYTES}')
if maxmemory == 0 then maxmemory = math.huge end
"""
EVEN_IF_FULL = """
-- Redis checks its memory at the first write of a script alone, and this one needs none.
redis.call('HDEL', KEYS[1], ' ')
"""
