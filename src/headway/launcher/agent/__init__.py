"""The node agent: a plain process without torch that starts the ranks of a node and supervises them."""
