"""Any module, traced without a GPU or measured on one: requests, results, and the processes that run them."""
