// Work of one call that the threads of whoever called share out.
#pragma once

#include <atomic>
#include <cstdint>

#include "headway.h"

namespace headway {

// Calls work(item, thread) for every item below `items`; each is done by one thread, and threads count from 0. Without a
// team the caller does all.
template <class Work>
void share(hw_team team, uint32_t threads, int64_t items, const Work& work) {
  struct Shared {
    const Work& work;
    const int64_t items;
    std::atomic<int64_t> next{0}, thread{0};
  } shared{work, items};
  const auto take = [](void* data) {
    Shared& s = *static_cast<Shared*>(data);
    const int64_t thread = s.thread.fetch_add(1, std::memory_order_relaxed);
    for (int64_t k; (k = s.next.fetch_add(1, std::memory_order_relaxed)) < s.items;) s.work(k, thread);
  };
  if (team && threads > 1 && items > 1)
    team(take, &shared, threads, 0);
  else
    take(&shared);
}

}  // namespace headway
