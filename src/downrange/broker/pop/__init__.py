"""POP consumption: the broker leases messages to consumers, who acknowledge them one by one. [PopMessageProcessor]

`pop.py` is what handlers of requests and a gRPC front end call; `leases.py` and `orders.py` are pure.
"""
