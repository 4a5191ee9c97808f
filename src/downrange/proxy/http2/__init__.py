"""HTTP/2 as gRPC uses it: requests in, messages and a status out. Header blocks are read by the package hpack."""
