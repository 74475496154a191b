"""Copies trees from one form into another, as a stream of leaves.

convert      any checkpoint into a new one
source       the leaves to copy, as a stream
target       the stream, written as a checkpoint
safetensors  out of safetensors files and into them
"""
