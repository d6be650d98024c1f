// SPDX-License-Identifier: Apache-2.0
// The .metadata file of torch.distributed.checkpoint: it is refused, or every part of every tensor has a place in a
// file beside it.

#include <cstdint>
#include <cstdlib>
#include <span>

#include "muster/error.hpp"
#include "src/checkpoint/model/model_files.hpp"
#include "src/checkpoint/thirdparty/dcp.hpp"
#include "tests/fuzz/target.hpp"

using namespace muster;
using muster::test::may_fail;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  may_fail({ErrorKind::corrupt, ErrorKind::unsupported}, [&] {
    thirdparty::DcpMetadata metadata;
    metadata.add(std::as_bytes(std::span(data, size)));
    metadata.finish();
    for (const std::string& file : metadata.files())
      if (!is_name_beside(file)) std::abort();
    for (const thirdparty::DcpTensor& tensor : metadata.tensors())
      for (const thirdparty::DcpChunk& chunk : tensor.chunks)
        if (chunk.file >= metadata.files().size()) std::abort();
  });
  return 0;
}
