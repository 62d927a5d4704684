"""Problems of KernelBench-Hard."""
