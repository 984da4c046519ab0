"""Tiers behind the prefix cache: host memory, and a disk behind it. The core knows them as ``Tiers`` alone."""
