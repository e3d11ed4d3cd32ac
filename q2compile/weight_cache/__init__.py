"""The option ``cache_weights``: codes of weights kept between calls. May import capture, linear and
recipes.
"""
