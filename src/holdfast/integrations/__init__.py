"""Other people's loops and monitoring systems: one module for each, over the public names of Holdfast alone.

Import the module that you need, such as `holdfast.integrations.prometheus`; each needs its framework to be installed.
"""
