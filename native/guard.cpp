// What becomes of a read beyond the end of a mapped file that was cut while it was in use.
//
// Ranges are noted in a table that never moves and has no locks: the handler may run anywhere, and a forked child takes
// the table as it stands.
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <new>

#include "guard.h"
#include "headway.h"

namespace headway {
namespace {

constexpr uint64_t kFree = 0, kClaimed = 1;  // as the beginning of a range: no range begins there
constexpr int64_t kChunk = 1024, kChunks = 1024;

struct Range {
  std::atomic<uint64_t> begin{kFree}, end{0};
  std::atomic<bool> lost{false};
};

struct Chunk {
  Range ranges[kChunk];
};

std::atomic<Chunk*> chunks[kChunks];
std::atomic<int64_t> next{0};     // where a free range is looked for
std::atomic<uint32_t> losses{0};  // ranges that are guarded and have lost something
std::atomic<pid_t> chaining{0};   // the thread whose fault was passed on to the handler before ours
struct sigaction before;          // that handler; written before ours can run, or again when another took our place

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<Chunk*>::is_always_lock_free,
              "a signal handler may not wait for a lock");

Range* range_at(int64_t ticket) {
  if (ticket < 0 || ticket >= kChunk * kChunks) return nullptr;
  Chunk* chunk = chunks[ticket / kChunk].load(std::memory_order_acquire);
  return chunk ? &chunk->ranges[ticket % kChunk] : nullptr;
}

Range* find(uint64_t address) {
  for (const std::atomic<Chunk*>& slot : chunks) {
    Chunk* chunk = slot.load(std::memory_order_acquire);
    if (!chunk) return nullptr;  // they are made in order
    for (Range& range : chunk->ranges) {
      const uint64_t begin = range.begin.load(std::memory_order_acquire);
      if (begin > kClaimed && address >= begin && address < range.end.load(std::memory_order_relaxed)) return &range;
    }
  }
  return nullptr;
}

// Puts zeros in the place of everything from the lost page to the range's end: a cut file has lost all of it, and one
// mapping is made instead of one a page, of which a process may have 65,530.
bool fill(Range& range, uint64_t address) {
  const uint64_t page = address & ~uint64_t(sysconf(_SC_PAGESIZE) - 1);
  const uint64_t end = range.end.load(std::memory_order_relaxed);
  void* const at = reinterpret_cast<void*>(page);
  if (mmap(at, end - page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return false;
  if (!range.lost.exchange(true)) losses.fetch_add(1);
  return true;
}

// The end that the process would have had without us: the instruction faults again, or the signal comes again.
void end_by(int number, const siginfo_t* info) {
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(number, &plain, nullptr);
  if (info->si_code <= 0) raise(number);
}

void pass_on(int number, siginfo_t* info, void* context) {
  const auto thread = pid_t(syscall(SYS_gettid));
  // Back again: the handler before ours put back what was before it, which is ours, and raised the signal anew.
  if (chaining.load() == thread) return end_by(number, info);
  if (!(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_DFL) return end_by(number, info);
  if (!(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_IGN) {
    if (info->si_code > 0) end_by(number, info);  // a fault cannot be ignored
    return;
  }
  chaining.store(thread);
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(number, info, context);
  else
    before.sa_handler(number);
  chaining.store(0);
}

void on_bus(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  Range* range = nullptr;
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr);
  if (info->si_code == BUS_ADRERR) range = find(address);
  if (!range || !fill(*range, address)) pass_on(number, info, context);
  errno = saved;
}

}  // namespace

// Whoever installs a handler after us would get our faults: faulthandler, which ends the process. So ours is put before
// it again whenever something is mapped, threads are made, or a batch is read. Where ours is there already, that is one
// system call.
void watch_faults() {
  struct sigaction now = {}, ours = {};
  if (sigaction(SIGBUS, nullptr, &now)) return;
  if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus) return;
  ours.sa_sigaction = on_bus;
  // NODEFER: what the handler before ours raises arrives while we know that we passed the fault on to it.
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  before = now;
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace headway

int64_t hw_guard(uint64_t address, uint64_t length) {
  using namespace headway;
  const uint64_t page = uint64_t(sysconf(_SC_PAGESIZE));
  if (address <= kClaimed || address % page || !length || length > UINT64_MAX - page - address) return -1;
  const int64_t start = next.load(std::memory_order_relaxed);
  for (int64_t i = 0; i < kChunk * kChunks; i++) {
    const int64_t ticket = (start + i) % (kChunk * kChunks);
    std::atomic<Chunk*>& slot = chunks[ticket / kChunk];
    if (!slot.load(std::memory_order_acquire)) {
      if (ticket / kChunk && !chunks[ticket / kChunk - 1].load(std::memory_order_acquire)) continue;
      Chunk* fresh = new (std::nothrow) Chunk;
      Chunk* none = nullptr;
      if (!fresh) return -1;
      if (!slot.compare_exchange_strong(none, fresh)) delete fresh;
    }
    Range& range = *range_at(ticket);
    uint64_t free = kFree;
    if (!range.begin.compare_exchange_strong(free, kClaimed)) continue;
    range.lost.store(false, std::memory_order_relaxed);
    range.end.store((address + length + page - 1) / page * page, std::memory_order_relaxed);
    range.begin.store(address, std::memory_order_release);
    next.store((ticket + 1) % (kChunk * kChunks), std::memory_order_relaxed);
    watch_faults();
    return ticket;
  }
  return -1;
}

void hw_unguard(int64_t ticket) {
  using namespace headway;
  Range* range = range_at(ticket);
  if (!range || range->begin.load() <= kClaimed) return;
  range->end.store(0, std::memory_order_relaxed);
  if (range->lost.exchange(false)) losses.fetch_sub(1);
  range->begin.store(kFree, std::memory_order_release);
  int64_t hint = next.load(std::memory_order_relaxed);
  if (ticket < hint) next.compare_exchange_strong(hint, ticket);  // so that the table stays short
}

void hw_watch(void) { headway::watch_faults(); }

int32_t hw_lost(int64_t ticket) {
  using namespace headway;
  if (ticket < 0) return int32_t(losses.load(std::memory_order_acquire));
  Range* range = range_at(ticket);
  return range && range->lost.load(std::memory_order_acquire);
}
