"""Entry points of torch.compile: the public functions as Dynamo traces them."""
