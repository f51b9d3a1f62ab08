// sparse_mla on the CPU: every query row over its own list of tokens of an MLA layer.
//
// Entries that count are taken in the order of the list, ignored ones leave no trace: a row's bits
// are the same wherever in the list those stand. A token that is named twice counts twice.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

Status supports_sparse_mla(const SparseMlaParams& params);

// The params have passed validate_sparse_mla and supports_sparse_mla.
void sparse_mla(const SparseMlaParams& params);

}  // namespace larder::kernels::cpu
