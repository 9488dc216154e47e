"""What ds4-tiny gets right on prompts made of words, tools and phrasings that training never saw.

    python -m ops.tiny.evaluate FILE [FILE2 ...]       # the table, by the product's CPU engine
    python -m ops.tiny.evaluate.rounding FILE          # what the roundings cost, by the torch model

`cases` makes the prompts, `served` lays them out and reads answers as the product does, `decoders`
answers them greedily, `answers` keeps what was answered, `judges` judges, `table` counts.
"""
