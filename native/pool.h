// The threads of the core: they live as long as the pool, sleep between jobs, and survive a fork of the process.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "worker.h"

namespace headway {

class Crew;

// One job at a time: a second caller waits. No lock outlives a fork: each process has threads and locks of its own,
// and a child forgets its parent's as they stood, whatever they were doing.
class Pool final {
 public:
  // Every thread that is awake in time calls a job once, with a worker that is its own; the job shares out the work.
  class Job {
   public:
    virtual void take(Worker& worker, int thread) = 0;

   protected:
    ~Job() = default;
  };

  static constexpr int kMostThreads = 1024;

  // Raises std::system_error where threads cannot be had.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // Returns when no thread is in the job any more. The caller is thread 0.
  void run(Job& job);

 private:
  Crew& crew();

  const int threads_;
  const std::vector<int> cpus_;
  std::atomic<Crew*> crew_;
};

}  // namespace headway
