"""The tiny tokenizer and the files of rows that the tests of the data room have too."""

from tests.train.data.conftest import tokenizer, write  # noqa: F401 (fixtures)
