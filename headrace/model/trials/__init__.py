"""Trials on tiny instances: does an architecture keep its bits when it is streamed?"""
