"""Settings of the whole suite."""

from hypothesis import settings

# The same examples in every run, so that a run that passed passes again. Looking for new ones:
# pytest --hypothesis-profile=search
settings.register_profile("suite", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=500)
settings.load_profile("suite")
