"""Products of routed experts with weights of two to four bits: a module for each format, which
says where its bits lie and how they become a tensor core's operands, and `experts`, the kernels."""
