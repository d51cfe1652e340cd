// The program of all targets.
//
// headway_fuzz TARGET FOLDER COUNT SECONDS SEED [FIRST]: FOLDER holds good JPEGs; it ends after COUNT inputs or
// SECONDS, whichever comes first (0: no limit); FIRST is the batch to begin with.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "alone.h"
#include "campaign.h"

namespace headway::fuzz {

std::vector<Bytes> read_seeds(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> seeds;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  for (size_t i = 0, count = seeds.size(); i < count; ++i) {
    Bytes with_markers = seekable(seeds[i]);
    if (!with_markers.empty()) seeds.push_back(std::move(with_markers));
  }
  return seeds;
}

std::vector<Crew> make_crews(int threads) {
  std::vector<Crew> crews;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    setenv("HEADWAY_ISA", isa, 1);
    if (strncmp(hw_features(), isa, strlen(isa))) continue;  // this processor lacks it
    crews.push_back({isa, hw_pool_create(threads, nullptr, 0)});
    printf("%s\n", hw_features());
  }
  return crews;
}

namespace {

struct Target {
  const char* name;
  int (*run)(const Campaign&);
};

constexpr Target kTargets[] = {{"decode", fuzz_decode},     {"gather", fuzz_gather}, {"optimize", fuzz_optimize},
                               {"convolve", fuzz_convolve},
                               {"changing", fuzz_changing}, {"sizes", fuzz_sizes},   {"fork", fuzz_fork},
                               {"share", fuzz_share}};

}  // namespace
}  // namespace headway::fuzz

int main(int count, char** arguments) {
  using namespace headway::fuzz;
  const auto number = [&](int place) { return place < count ? strtoull(arguments[place], nullptr, 10) : 0; };
  for (const Target& target : kTargets) {
    if (count < 6 || strcmp(arguments[1], target.name)) continue;
    watch();
    return target.run({arguments[2], number(3), unsigned(number(4)), number(5), number(6)});
  }
  fprintf(stderr, "usage: headway_fuzz TARGET FOLDER COUNT SECONDS SEED [FIRST]\n");
  return 2;
}
