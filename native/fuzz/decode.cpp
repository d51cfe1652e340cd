// Feeds damaged JPEGs to the core, between good ones whose pixels are known. Built with sanitizers, it ends with an
// error at the first read or write beyond a buffer, undefined operation, hang, changed neighbour or wrong status, and
// leaves the batch's files where it can be run again.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "alone.h"
#include "campaign.h"

namespace headway::fuzz {
namespace {

constexpr size_t kBatch = 64;          // of which every other one is damaged
constexpr uint32_t kMaxScans = 50;

const hw_spec kSpecs[] = {{sizeof(hw_spec), 24, 24, 3, 0, kMaxPixels, kMaxScans},
                          {sizeof(hw_spec), 17, 40, 3, 1, kMaxPixels, kMaxScans},
                          {sizeof(hw_spec), 5, 9, 1, 1, kMaxPixels, kMaxScans},
                          {sizeof(hw_spec), 96, 64, 1, 0, kMaxPixels, kMaxScans},
                          {sizeof(hw_spec), 1, 1, 3, 1, kMaxPixels, kMaxScans}};
constexpr size_t kSpecCount = std::size(kSpecs);

Box random_box(const hw_info& info, Random& random) {
  const auto width = float(info.width), height = float(info.height);
  if (random.one_in(3)) return {0, 0, width, height};
  const float w = width * (0.02f + 0.98f * random.unit()), h = height * (0.02f + 0.98f * random.unit());
  return {(width - w) * random.unit(), (height - h) * random.unit(), w, h};
}

// Boxes that no caller should give.
Box strange_box(Random& random) {
  static const float kStrange[] = {-1, 0, 1e-30f, 0.5f, 70000, 1e30f, __builtin_inff(), __builtin_nanf("")};
  const auto one = [&] { return kStrange[random.below(std::size(kStrange))]; };
  return {one(), one(), one(), one()};
}

// A good file, and what each spec makes of it.
struct Good {
  Bytes file;
  Box box[kSpecCount];
  Bytes pixels[kSpecCount];
};

std::vector<Good> decode_seeds(const Crew& crew, const std::vector<Bytes>& seeds, Random& random) {
  std::vector<Good> goods;
  for (const Bytes& file : seeds) {
    hw_info info{};
    if (hw_probe(file.data(), file.size(), &info)) fail("a seed is not good", goods.size());
    Good good{file, {}, {}};
    for (size_t spec = 0; spec < kSpecCount; ++spec) {
      good.box[spec] = random_box(info, random);
      Batch batch;
      batch.add(file, good.box[spec], 0);
      const Result result = decode(crew, batch, kSpecs[spec]);
      if (result.status[0] != HW_OK) fail("a seed is not good", goods.size());
      good.pixels[spec].assign(result.out.begin(), result.out.begin() + ptrdiff_t(image_size(kSpecs[spec])));
    }
    goods.push_back(std::move(good));
  }
  return goods;
}

// Fills the batch: even places are good, odd ones damaged. Returns which seed each is of.
std::vector<size_t> fill(Batch& batch, const std::vector<Bytes>& seeds, const std::vector<Good>& goods, size_t spec,
                         Random& random) {
  std::vector<size_t> which;
  for (size_t place = 0; place < kBatch; ++place) {
    const size_t seed = which.emplace_back(random.below(seeds.size()));
    if (place % 2 == 0) {
      batch.add(seeds[seed], goods[seed].box[spec], 0);
      continue;
    }
    const Bytes damaged = mutate(seeds, seed, random);
    hw_info info{};
    // The box is of what the damaged header says, else the decoders would hardly run.
    if (hw_probe(damaged.data(), damaged.size(), &info)) hw_probe(seeds[seed].data(), seeds[seed].size(), &info);
    batch.add(damaged, random.one_in(50) ? strange_box(random) : random_box(info, random), uint8_t(random.below(4)));
    batch.crc[place] = hw_crc32c(seeds[seed].data(), seeds[seed].size());
    batch.check[place] = random.one_in(20);
    if (random.one_in(100)) {
      batch.kind[place] = random.one_in(2) ? HW_RAW : HW_RAW_PLANAR;
      for (size_t side = 0; side < 3; ++side) batch.shape[3 * place + side] = uint32_t(random.below(300));
    }
  }
  return which;
}

// What holds for one image, if it is good (even places) or damaged.
void check(const Batch& batch, size_t place, const Good& good, size_t spec, uint8_t status, const uint8_t* image) {
  if (place % 2 == 0) {
    if (status != HW_OK || memcmp(image, good.pixels[spec].data(), good.pixels[spec].size()))
      fail("it is good, and was changed by its neighbours", place);
    return;
  }
  const Exact& file = batch.files[place];
  const bool damaged = file.size() != good.file.size() || memcmp(file.data(), good.file.data(), file.size());
  if ((status == HW_CHECKSUM) != (batch.check[place] && damaged)) fail("its checksum was not judged right", place);
}

// Returns how many of the damaged images could be decoded nevertheless.
size_t run_batch(const std::vector<Crew>& crews, const std::vector<Bytes>& seeds, const std::vector<Good>& goods,
                 Random& random) {
  const size_t spec = random.below(kSpecCount), step = stride(kSpecs[spec]);
  Batch batch;
  now.batch = &batch;
  const std::vector<size_t> which = fill(batch, seeds, goods, spec, random);
  for (size_t place = 1; place < kBatch; place += 2) alone(batch.files[place], place, random);
  Result first;
  for (const Crew& crew : crews) {
    const Result result = decode(crew, batch, kSpecs[spec]);
    if (&crew == &crews[0]) first = result;
    for (size_t i = 0; i < kBatch; ++i) {
      check(batch, i, goods[which[i]], spec, result.status[i], &result.out[i * step]);
      if (result.status[i] != first.status[i] || memcmp(&result.out[i * step], &first.out[i * step], step))
        fail("instruction sets differ", i);
    }
  }
  now.batch = nullptr;
  return size_t(std::count(first.status.begin(), first.status.end(), HW_OK)) - kBatch / 2;
}

}  // namespace

int fuzz_decode(const Campaign& campaign) {
  const std::vector<Crew> crews = make_crews(2);
  const std::vector<Bytes> seeds = read_seeds(campaign.folder);
  Random random(0);
  const std::vector<Good> goods = decode_seeds(crews[0], seeds, random);
  size_t decoded = 0;
  const size_t count = campaign.run([&](Random& of_batch) {
    decoded += run_batch(crews, seeds, goods, of_batch);
    return kBatch / 2;
  });
  for (const Crew& crew : crews) hw_pool_destroy(crew.pool);
  printf("%zu damaged images, made of %zu good ones; %zu could be decoded; no changed neighbour\n", count, seeds.size(),
         decoded);
  return 0;
}

}  // namespace headway::fuzz
