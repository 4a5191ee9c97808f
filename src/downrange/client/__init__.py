"""The side that asks: sessions with a cluster, and what operators, producers and consumers do through them."""
