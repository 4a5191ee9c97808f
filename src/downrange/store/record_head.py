# TEMPORARY: for commit_log.append and its relatives, until they import from model.record.
from downrange.model.record import CRC_MASK, HEAD_V4, HEADS, SIZE_AND_MAGIC

__all__ = ["CRC_MASK", "HEADS", "HEAD_V4", "SIZE_AND_MAGIC"]
