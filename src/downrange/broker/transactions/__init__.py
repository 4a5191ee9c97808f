"""Transactional messages inside the broker.

A half message waits in RMQ_SYS_TRANS_HALF_TOPIC. Its end is an *op* message in RMQ_SYS_TRANS_OP_HALF_TOPIC that names
its queue offset; a commit also writes the message to its real topic, just before the op. Nothing is ever changed in
place, so whatever a crash leaves behind says for each half message that it ended, or that it did not.
"""
