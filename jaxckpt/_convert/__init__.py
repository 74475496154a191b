"""Copies trees from one form into another, as a stream of leaves."""
