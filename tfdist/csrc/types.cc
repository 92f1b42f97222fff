#include "types.h"

#include <algorithm>
#include <cstring>

namespace tfdist {

const char* NameOf(DType type) {
  static const char* const names[] = {"bool",    "uint8",    "int8",    "int32",  "int64",
                                      "float16", "bfloat16", "float32", "float64"};
  const auto i = static_cast<size_t>(type);
  return i < kDTypes ? names[i] : "unknown type";
}

const char* NameOf(ReduceOp op) {
  static const char* const names[] = {"sum", "mean", "min", "max", "product"};
  const auto i = static_cast<size_t>(op);
  return i < kReduceOps ? names[i] : "unknown reduction";
}

const char* NameOf(Kind kind) {
  static const char* const names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                      "all_to_all", "barrier",        "send",       "receive"};
  const auto i = static_cast<size_t>(kind);
  return i < kKinds ? names[i] : "unknown collective";
}

void Fingerprint::SetName(const std::string& text) {
  std::memset(name, 0, sizeof(name));
  // A name that is too long loses its beginning, because its end is more specific.
  const size_t skipped = text.size() < sizeof(name) ? 0 : text.size() - sizeof(name) + 1;
  std::memcpy(name, text.data() + skipped, text.size() - skipped);
}

void Fingerprint::AddShape(const std::vector<int64_t>& shape) {
  uint64_t elements = 1;
  const auto mix = [this](uint64_t value) {
    shapes = (shapes ^ (value + 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu;
    shapes ^= shapes >> 32;
  };
  mix(shape.size());
  for (const int64_t dim : shape) {
    mix(static_cast<uint64_t>(dim));
    elements *= static_cast<uint64_t>(dim);
  }
  if (tensors == 0 && shape.size() <= 4) {
    dimensions = static_cast<uint8_t>(shape.size());
    std::copy(shape.begin(), shape.end(), dims);
  } else if (tensors == 0) {
    dimensions = 255;
  }
  ++tensors;
  count += elements;
}

void Fingerprint::AddRows(const std::vector<int64_t>& shape) {
  AddShape({shape.begin() + 1, shape.end()});
  if (tensors > 1 || shape.size() > 4) return;
  dimensions = static_cast<uint8_t>(shape.size());
  std::copy(shape.begin(), shape.end(), dims);
}

bool Agree(const Fingerprint& mine, const Fingerprint& theirs) {
  const bool pair = (mine.kind == Kind::kSend && theirs.kind == Kind::kReceive) ||
                    (mine.kind == Kind::kReceive && theirs.kind == Kind::kSend);
  return (pair || mine.kind == theirs.kind) && mine.sequence == theirs.sequence &&
         mine.shapes == theirs.shapes && mine.count == theirs.count && mine.root == theirs.root &&
         mine.tensors == theirs.tensors && mine.type == theirs.type && mine.op == theirs.op &&
         mine.algorithm == theirs.algorithm && mine.codec == theirs.codec &&
         mine.failures == theirs.failures && mine.on_device == theirs.on_device &&
         std::memcmp(mine.name, theirs.name, sizeof(mine.name)) == 0;
}

std::string Describe(const Fingerprint& f) {
  std::string text = NameOf(f.kind);
  const std::string name(f.name, strnlen(f.name, sizeof(f.name)));
  if (!name.empty()) {
    text += " '";
    for (const char c : name) text += c >= ' ' && c < 127 ? c : '?';
    text += "'";
  }
  if (f.kind != Kind::kBarrier) {
    text += std::string(" ") + NameOf(f.type);
    // If all_gather or all_to_all is called through the C interface, its fingerprint contains no
    // shape.
    if (f.tensors > 0) {
      text += "[";
      if (f.dimensions <= 4) {
        for (int i = 0; i < f.dimensions; ++i) {
          text += (i ? "," : "") + std::to_string(f.dims[i]);
        }
      } else {
        text += "...";
      }
      text += "]";
      if (f.tensors > 1) {
        text += " and " + std::to_string(f.tensors - 1) + " more, " + std::to_string(f.count) +
                " elements";
      }
    }
  }
  if (f.kind == Kind::kAllReduce || f.kind == Kind::kReduceScatter) {
    text += std::string(" ") + NameOf(f.op);
  }
  if (f.kind == Kind::kBroadcast) text += " from rank " + std::to_string(f.root);
  return text;
}

bool FailedMore(uint8_t failures, uint8_t others) {
  return static_cast<int8_t>(failures - others) > 0;
}

Error Disagreement(const std::string& rank, const Fingerprint& joined,
                   const std::string& other_rank, const Fingerprint& other_joined) {
  Fingerprint same = other_joined;
  same.failures = joined.failures;
  if (Agree(joined, same)) {
    const bool mine = FailedMore(joined.failures, other_joined.failures);
    const std::string& failed = mine ? rank : other_rank;
    return Error(Code::kUnavailable, failed + " has continued after a step that failed only there.",
                 Event::kFailed, failed);
  }
  const auto side = [](const std::string& name, const Fingerprint& f) {
    return name + " is in " + Describe(f) + " (number " + std::to_string(f.sequence) + ")";
  };
  std::string mine = side(rank, joined), theirs = side(other_rank, other_joined);
  if (theirs < mine) std::swap(mine, theirs);
  const bool rows = joined.kind == Kind::kAllGather || joined.kind == Kind::kAllToAll;
  const bool names = std::memcmp(joined.name, other_joined.name, sizeof(joined.name)) != 0;
  std::string why;
  if (joined.failures != other_joined.failures) {
    why = " A step failed on only one of them.";
  } else if (joined.algorithm != other_joined.algorithm) {
    why = " TFDIST_ALGORITHM differs.";
  } else if (joined.on_device != other_joined.on_device) {
    why = " Only one of them uses a GPU.";
  } else if (joined.codec != other_joined.codec) {
    why = " The compression differs.";
  } else if (names && joined.kind == other_joined.kind) {
    why = " They were called at different places, or by different names.";
  } else if (rows && joined.kind == other_joined.kind && joined.shapes != other_joined.shapes) {
    why = " Their shapes may differ only in the first dimension.";
  } else if (Describe(joined) == Describe(other_joined)) {
    why = " The shapes differ.";
  }
  return Error(Code::kMismatch,
               "The ranks do not call the same collectives in the same order: " + mine +
                   ", where " + theirs + "." + why +
                   " Run one program, with the same arguments and data, on all ranks.");
}

}  // namespace tfdist
