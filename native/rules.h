// What the rules of hw_optimize make of options, norms and counts. The formulas have their sources in headway.optim.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "headway.h"
#include "update.h"

namespace headway {

// One rule in one step. Parameters are numbered; a stretch is a part of one.
template <class T>
class Rule {
 public:
  virtual ~Rule() = default;

  // Called first for each parameter i, by one thread. Whether `finish` needs sums over all of it.
  virtual bool prepare(int64_t i) = 0;
  // Whether `first` needs the state, beside weights and gradients.
  virtual bool first_reads_state() const { return false; }
  // The sums of a stretch.
  virtual void first(int64_t, const Stretch<T>&, int64_t, double[2]) {}
  // With the sums over the whole parameter.
  virtual void finish(int64_t, const double[2]) {}
  // The step of a stretch. `after_first`: its first() has been called.
  virtual void second(int64_t i, const Stretch<T>&, int64_t n, bool after_first) = 0;
};

// The number of this step of a parameter, from 1.
inline double number_of(const hw_step& s, int64_t i) { return double(*reinterpret_cast<const float*>(s.count[i])) + 1; }

inline double scale_of(const hw_step& s) { return s.grad_scale ? 1 / double(*s.grad_scale) : 1.0; }

// 1 where a norm is 0: nothing is known of the layer yet, or it has no gradient.
inline double ratio_or_one(double above, double below) { return above > 0 && below > 0 ? above / below : 1.0; }

template <class T>
class Lars final : public Rule<T> {
 public:
  Lars(const hw_step& s, const Update<T>& u)
      : s_(s), u_(u), by_(size_t(s.n)), scale_(scale_of(s)), lr_(*s.lr), momentum_(s.options[0]),
        decay_(s.options[1]), eta_(s.options[2]), eps_(s.options[3]), nesterov_(s.options[4] != 0),
        inside_(s.options[5] != 0), clip_(s.options[6] != 0) {}

  bool prepare(int64_t i) override {
    if (!s_.adapt[i]) set(i, 1);
    return s_.adapt[i];
  }

  void first(int64_t, const Stretch<T>& at, int64_t n, double sums[2]) override {
    sums[0] = u_.squares(at.w, n);
    sums[1] = u_.squares(at.g, n);
  }

  void finish(int64_t i, const double sums[2]) override {
    const double w = std::sqrt(sums[0]), g = std::sqrt(sums[1]) * scale_;
    double trust = 1;
    if (w > 0 && g > 0) {
      trust = eta_ * w / (g + decay_ * w + eps_);
      if (clip_ && trust > lr_) trust = lr_;
      if (clip_) trust = lr_ > 0 ? trust / lr_ : 1;
    }
    set(i, trust);
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool) override {
    (!s_.first ? u_.plain : nesterov_ ? u_.nesterov : u_.momentum)(at, n, by_[size_t(i)]);
  }

 private:
  void set(int64_t i, double trust) {
    const double within = inside_ ? lr_ * trust : trust;
    by_[size_t(i)] = {T(momentum_), T(within * scale_), T(within * decay_), T(inside_ ? 1 : lr_)};
  }

  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Momentum<T>> by_;
  const double scale_, lr_, momentum_, decay_, eta_, eps_;
  const bool nesterov_, inside_, clip_;
};

template <class T>
class Lamb final : public Rule<T> {
 public:
  Lamb(const hw_step& s, const Update<T>& u) : s_(s), u_(u), by_(size_t(s.n)), scale_(scale_of(s)), lr_(*s.lr) {}

  bool prepare(int64_t i) override {
    const double beta1 = s_.options[0], beta2 = s_.options[1], t = number_of(s_, i);
    by_[size_t(i)] = {T(scale_),        T(beta1),
                      T(1 - beta1),     T(beta2),
                      T(1 - beta2),     T(-1 / std::expm1(t * std::log(beta1))),
                      T(-1 / std::expm1(t * std::log(beta2))), T(s_.options[2]),
                      T(s_.options[3]), T(lr_)};
    return s_.adapt[i];
  }

  bool first_reads_state() const override { return true; }

  void first(int64_t i, const Stretch<T>& at, int64_t n, double sums[2]) override {
    u_.moments(at, n, by_[size_t(i)], sums);
  }

  void finish(int64_t i, const double sums[2]) override {
    by_[size_t(i)].rate = T(lr_ * ratio_or_one(std::sqrt(sums[0]), std::sqrt(sums[1])));
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool after_first) override {
    (after_first ? u_.moments_step : u_.moments_both)(at, n, by_[size_t(i)]);
  }

 private:
  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Moments<T>> by_;
  const double scale_, lr_;
};

template <class T>
class NovoGrad final : public Rule<T> {
 public:
  NovoGrad(const hw_step& s, const Update<T>& u) : s_(s), u_(u), by_(size_t(s.n)), scale_(scale_of(s)) {}

  bool prepare(int64_t) override { return true; }

  void first(int64_t, const Stretch<T>& at, int64_t n, double sums[2]) override {
    sums[0] = u_.squares(at.g, n);
    sums[1] = 0;
  }

  void finish(int64_t i, const double sums[2]) override {
    const double beta1 = s_.options[0], beta2 = s_.options[1], square = sums[0] * scale_ * scale_;
    T& moment = *reinterpret_cast<T*>(s_.norm[i]);
    moment = T(number_of(s_, i) == 1 ? square : beta2 * double(moment) + (1 - beta2) * square);
    const double share = s_.options[4] != 0 ? 1 - beta1 : 1, below = std::sqrt(double(moment)) + s_.options[2];
    by_[size_t(i)] = {T(beta1), T(below > 0 ? share * scale_ / below : 0), T(share * s_.options[3]), T(*s_.lr)};
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool) override { u_.momentum(at, n, by_[size_t(i)]); }

 private:
  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Momentum<T>> by_;
  const double scale_;
};

template <class T>
class Signum final : public Rule<T> {
 public:
  Signum(const hw_step& s, const Update<T>& u) : u_(u) {
    const double rest = 1 - s.options[0], lr = *s.lr;
    by_ = {T(s.options[0]), T(rest * scale_of(s)), T(rest * s.options[1]), T(1 - lr * s.options[2]), T(lr)};
  }

  bool prepare(int64_t) override { return false; }

  void second(int64_t, const Stretch<T>& at, int64_t n, bool) override { u_.sign(at, n, by_); }

 private:
  const Update<T>& u_;
  Sign<T> by_;
};

template <class T>
class Ftml final : public Rule<T> {
 public:
  Ftml(const hw_step& s, const Update<T>& u) : s_(s), u_(u), by_(size_t(s.n)) {}

  bool prepare(int64_t i) override {
    const double beta1 = s_.options[0], beta2 = s_.options[1], t = number_of(s_, i);
    const double whole1 = beta1 > 0 ? -std::expm1(t * std::log(beta1)) : 1;
    by_[size_t(i)] = {T(scale_of(s_)), T(s_.options[3]), T(beta2), T(1 - beta2),
                      T(-1 / std::expm1(t * std::log(beta2))), T(s_.options[2]), T(*s_.lr * (1 - beta1) / whole1)};
    return false;
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool) override { u_.leader(at, n, by_[size_t(i)]); }

 private:
  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Leader<T>> by_;
};

template <class T>
class RmspropSgd final : public Rule<T> {
 public:
  RmspropSgd(const hw_step& s, const Update<T>& u) : s_(s), u_(u), by_(size_t(s.n)) {}

  bool prepare(int64_t i) override {
    const double* o = s_.options;
    const double away = (number_of(s_, i) - 1 - o[5]) / o[6];
    const double sgd = away < 0 ? std::exp(2 * away) / 2 : std::fmin(0.5 + away, 1);
    by_[size_t(i)] = {T(scale_of(s_)), T(o[3]), T(o[0]), T(o[1]), T(1 - o[1]), T(sgd), T((1 - sgd) * o[4]), T(o[2]),
                      T(*s_.lr)};
    return false;
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool) override { u_.transition(at, n, by_[size_t(i)]); }

 private:
  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Transition<T>> by_;
};

template <class T>
class Lbsgd final : public Rule<T> {
 public:
  Lbsgd(const hw_step& s, const Update<T>& u)
      : s_(s), u_(u), by_(size_t(s.n)), moves_(size_t(s.n)), scale_(scale_of(s)), steps_(s.options[2]),
        share_(s.second ? 1 / steps_ : scale_) {}

  bool prepare(int64_t i) override {
    const double t = number_of(s_, i) + s_.options[5];
    moves_[size_t(i)] = std::fmod(t, steps_) == 0;
    if (!moves_[size_t(i)]) return false;
    if (s_.options[3] == 3) return true;
    const double part = s_.options[4] > 0 ? std::fmin(t / s_.options[4], 1) : 1;
    const double grown = s_.options[3] == 0 ? part : s_.options[3] == 1 ? part * part : std::sqrt(part);
    set(i, 1 + (steps_ - 1) * grown);
    return false;
  }

  bool first_reads_state() const override { return true; }

  void first(int64_t, const Stretch<T>& at, int64_t n, double sums[2]) override {
    sums[0] = u_.squares(at.w, n);
    sums[1] = u_.squares(summed(at, n), n);
  }

  void finish(int64_t i, const double sums[2]) override {
    const double below = sums[1] * share_ * share_ + s_.options[1] * sums[0] + 1e-18;
    set(i, std::fmin(std::fmax(std::sqrt(sums[0] / below), 0.01), 100));
  }

  void second(int64_t i, const Stretch<T>& at, int64_t n, bool after_first) override {
    const T* g = after_first && at.second ? at.second : summed(at, n);
    if (!moves_[size_t(i)]) return;
    (s_.first ? u_.momentum : u_.plain)({at.w, g, at.first, nullptr}, n, by_[size_t(i)]);
    if (at.second) std::memset(at.second, 0, size_t(n) * sizeof(T));
  }

 private:
  // The gradient, or with that of the steps before in the macro-batch.
  const T* summed(const Stretch<T>& at, int64_t n) const {
    if (!at.second) return at.g;
    u_.sum(at.g, at.second, n, T(scale_));
    return at.second;
  }

  void set(int64_t i, double factor) {
    const double rate = *s_.lr * factor;
    by_[size_t(i)] = {T(s_.options[0]), T(rate * share_), T(rate * s_.options[1]), T(1)};
  }

  const hw_step& s_;
  const Update<T>& u_;
  std::vector<Momentum<T>> by_;
  std::vector<char> moves_;
  const double scale_, steps_, share_;
};

// NULL: there is no such rule.
template <class T>
std::unique_ptr<Rule<T>> make_rule(const hw_step& s, const Update<T>& u) {
  switch (s.rule) {
    case HW_LARS: return std::make_unique<Lars<T>>(s, u);
    case HW_LAMB: return std::make_unique<Lamb<T>>(s, u);
    case HW_NOVOGRAD: return std::make_unique<NovoGrad<T>>(s, u);
    case HW_SIGNUM: return std::make_unique<Signum<T>>(s, u);
    case HW_FTML: return std::make_unique<Ftml<T>>(s, u);
    case HW_TRANSITION: return std::make_unique<RmspropSgd<T>>(s, u);
    case HW_LBSGD: return std::make_unique<Lbsgd<T>>(s, u);
    default: return nullptr;
  }
}

}  // namespace headway
