// hw_optimize with wrong sizes, counts, types and pointers: refused with nothing changed, or done with nothing touched
// beside the tensors. And every other entry of headway.h with NULL where it may not be.
#include <algorithm>

#include "campaign.h"

namespace headway::fuzz {
namespace {

// The tensors of one role: exactly as long as they have to be.
struct Tensors {
  std::vector<Exact> memory;
  std::vector<uint64_t> address;

  void add(size_t bytes, Random& random) {
    Bytes values(bytes);
    for (uint8_t& value : values) value = random.one_in(3) ? random.byte() : 0;
    memory.emplace_back(values);
    address.push_back(memory.back().address());
  }
};

size_t one(Random& random) {
  // the last two are too many for numbers of 4 bytes
  static constexpr int64_t kWrong[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX / 4, int64_t(1) << 61};
  hw_step step{};
  const size_t n = random.below(7);
  step.size = random.one_in(20) ? odd_number(random) : sizeof step;
  step.rule = uint32_t(random.below(random.one_in(8) ? 10 : 7));
  step.type = uint32_t(random.below(random.one_in(8) ? 4 : 3));
  const bool has_keys = random.one_in(8) ? random.one_in(2) : step.type == HW_BF16 || random.one_in(3);
  step.threads = random.one_in(3) ? 1 + uint32_t(random.below(3)) : 1;
  step.team = random.one_in(2) ? run_team : nullptr;
  step.n = int64_t(n);
  const size_t scalar = step.type == HW_FP64 ? 8 : 4, width = step.type == HW_BF16 ? 2 : scalar;
  const size_t state = has_keys ? 2 : width;
  const size_t widths[6] = {width, width, state, state, 4, scalar};
  Tensors roles[6];  // weight, grad, first, second, count, norm
  std::vector<int64_t> elements;
  std::vector<uint64_t> keys;
  Bytes adapt;
  double options[8], lr = random.unit();
  for (double& option : options)
    option = random.one_in(6) ? 0 : random.one_in(6) ? __builtin_nan("") : double(random.unit());
  if (random.one_in(3)) options[2] = 1 + double(random.below(3));
  for (size_t i = 0; i < n; i++) {
    elements.push_back(int64_t(random.one_in(8) ? 20000 + random.below(20000) : random.below(50)));
    for (int role = 0; role < 6; role++)
      roles[role].add(role > 3 ? widths[role] : size_t(elements[i]) * widths[role], random);
    adapt.push_back(random.one_in(2));
    keys.push_back(uint64_t(random.below(1 << 30)) << 32 | random.below(1 << 30));
  }
  bool must_refuse = step.size != sizeof step || step.rule > HW_LBSGD || step.type > HW_BF16;
  if (n && (has_keys ? step.type == HW_FP64 : step.type == HW_BF16)) must_refuse = true;
  const bool some = n && random.one_in(3);
  if (some) {
    const size_t at = random.below(n);
    const int role = int(random.below(6));
    uint64_t& address = roles[role].address[at];
    switch (random.below(4)) {
      case 0:
        elements[at] = kWrong[random.below(width == 2 ? 3 : 5)], must_refuse = true;
        break;
      case 1:
        if (elements[at] || role > 3) address = 0, must_refuse = true;
        break;
      case 2:
        address += widths[role] == 2 ? 1 : 1 + random.below(3), must_refuse = true;
        break;
      default:  // the tensor would end beyond the last address
        address = role > 3 ? 0 : UINT64_MAX - 7, elements[at] = std::max<int64_t>(elements[at], 5), must_refuse = true;
    }
  }
  if (random.one_in(20)) {
    step.n = random.one_in(2) ? -1 - int64_t(random.below(9)) : int64_t(INT32_MAX) + 1;
    must_refuse = true;
  }
  step.weight = roles[0].address.data(), step.grad = roles[1].address.data(), step.first = roles[2].address.data();
  step.second = roles[3].address.data(), step.count = roles[4].address.data(), step.norm = roles[5].address.data();
  step.elements = elements.data(), step.adapt = adapt.data(), step.options = options, step.lr = &lr;
  step.key = has_keys ? keys.data() : nullptr;
  const uint64_t** const arrays[] = {&step.weight, &step.grad, &step.first, &step.second, &step.count, &step.norm};
  if (n && random.one_in(6)) {
    const size_t which = random.below(9);
    if (which < 6) *arrays[which] = nullptr;
    if (which == 6) step.elements = nullptr;
    if (which == 7) step.options = nullptr;
    if (which == 8) step.lr = nullptr;
    must_refuse = must_refuse || which < 2 || which > 5;
    if (some) return 0;  // what was wrong may be looked at no more
  }
  std::vector<Bytes> before;
  for (const Tensors& role : roles)
    for (const Exact& tensor : role.memory) before.emplace_back(tensor.data(), tensor.data() + tensor.size());
  const int32_t result = hw_optimize(&step);
  if (result != 0 && result != -1) fail("optimize has another result", n);
  if (must_refuse && result == 0) fail("a wrong step was done", n);
  if (result == 0) return 1;
  size_t at = 0;
  for (const Tensors& role : roles)
    for (const Exact& tensor : role.memory) {
      const Bytes& was = before[at++];
      if (!std::equal(was.begin(), was.end(), tensor.data())) fail("a step was refused and changed something", n);
    }
  return 1;
}

bool gather_nothing(hw_pool* pool) {
  uint8_t out = 0, status = 0;
  return hw_gather(pool, 1, nullptr, nullptr, nullptr, nullptr, HW_RAW, 1, 1, 1, nullptr, nullptr, &out, 1, &status) ==
         -1;
}

// NULLs at every entry.
void nothing() {
  hw_info info{};
  int32_t region[4] = {0, 0, 1, 1}, held[4];
  uint8_t byte = 0xFF;
  char reason[200] = "";
  const hw_spec spec{sizeof(hw_spec), 1, 1, 3, 0, 0, 0};
  const hw_items items{};
  hw_pool* const pool = hw_pool_create(1, nullptr, 0);
  const bool refused =
      hw_optimize(nullptr) == -1 && hw_crc32c(nullptr, 9) == 0 && hw_probe(nullptr, 9, &info) &&
      hw_probe(&byte, 1, nullptr) && !hw_seekable(nullptr, 9, nullptr, &byte, 1, reason) &&
      !hw_seekable(&byte, 1, nullptr, nullptr, 9, nullptr) &&
      !hw_splice(nullptr, 9, region, held, &byte, 1, reason) && !hw_splice(&byte, 1, nullptr, held, &byte, 1, reason) &&
      !hw_splice(&byte, 1, region, nullptr, &byte, 1, nullptr) &&
      !hw_splice(&byte, 1, region, held, nullptr, 9, reason) &&
      hw_decode_batch(nullptr, 1, &items, &spec, &byte, 3, &byte, nullptr) == -1 &&
      hw_decode_batch(pool, 1, nullptr, &spec, &byte, 3, &byte, nullptr) == -1 &&
      hw_decode_batch(pool, 1, &items, nullptr, &byte, 3, &byte, nullptr) == -1 &&
      hw_decode_batch(pool, 1, &items, &spec, &byte, 3, &byte, nullptr) == -1 &&
      hw_decode_batch(pool, -1, &items, &spec, &byte, 3, &byte, nullptr) == -1 &&
      gather_nothing(nullptr) && gather_nothing(pool) &&
      !hw_pool_create(0, nullptr, 0) && !hw_pool_create(2, nullptr, 3) && !hw_pool_create(1, nullptr, -1) &&
      hw_guard(0, 1) == -1 && hw_guard(4096, 0) == -1 && hw_guard(4097, 1) == -1 && hw_guard(4096, UINT64_MAX) == -1 &&
      !hw_lost(1 << 30);
  hw_unguard(-1), hw_unguard(1 << 30), hw_unguard(5);
  hw_pool_destroy(nullptr), hw_pool_destroy(pool);
  if (!refused) fail("NULL was not refused", 0);
}

}  // namespace

int fuzz_optimize(const Campaign& campaign) {
  nothing();
  campaign.run(one);
  return 0;
}

}  // namespace headway::fuzz
