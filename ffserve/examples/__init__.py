"""Complete programs that use ffserve: ``python -m ffserve.examples.NAME --help``.

    read_and_write   write a record file and read it in every way
    load_torch       read files through a PyTorch DataLoader
    train_torch      train a small model with PyTorch, as `ffserve demo` does
    train_numpy      the same with numpy
    spark_torch      prepare a table in Spark by entity, and train on its partitions with PyTorch
    ray_torch        prepare a table in Ray, and feed a training loop of PyTorch from it

Nothing in them names the daemon. They find it by its socket, and read the files directly when no
daemon is running.
"""
