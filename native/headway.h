/* The native core: one call decodes one batch, does one step of an optimizer, or computes one convolution. Plain C,
 * loaded with ctypes; knows neither Python nor torch.
 *
 * No exception crosses this boundary, nothing here takes the interpreter's lock, and a bad image fills zeros and sets
 * its status without touching its neighbours. What an image becomes is defined by the Pillow reference
 * (src/headway/data/reference.py): same boxes, same antialiased bilinear kernel, |difference| <= 1. */
#ifndef HEADWAY_H
#define HEADWAY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HW_API __attribute__((visibility("default")))
#define HW_ABI 9

/* What became of one image; the numbers of headway.data.reference.DecodeStatus, and one more. */
enum { HW_OK = 0, HW_CHECKSUM = 1, HW_UNDECODABLE = 2, HW_FOREIGN = 3 /* no JPEG: for the reference */ };

/* What the bytes of an item are. */
enum { HW_JPEG = 0, HW_RAW = 1 /* uint8 [h, w, c] */, HW_RAW_PLANAR = 2 /* uint8 [c, h, w] */ };

/* What an image comes to be; the same for a whole batch. */
typedef struct {
  uint32_t size;       /* sizeof(hw_spec), for the day it grows */
  uint32_t height;     /* of the output */
  uint32_t width;
  uint32_t channels;   /* of the output: 1 or 3 */
  uint32_t scaled;     /* 1: decode at 1/2, 1/4 or 1/8 where the box is that much larger than the output (inexact) */
  uint32_t max_pixels; /* larger images are HW_UNDECODABLE; 0: no limit */
  uint32_t max_scans;  /* progressive images of more scans are HW_UNDECODABLE; 0: no limit */
} hw_spec;

/* Bits of an image's flip: mirrored left to right, and top to bottom. */
enum { HW_FLIP_HORIZONTAL = 1, HW_FLIP_VERTICAL = 2 };

/* The images of a batch: one entry of each array an image; an array that may be NULL says so. */
typedef struct {
  const uint64_t* address; /* of its bytes */
  const uint64_t* length;  /* in bytes */
  const uint32_t* crc;     /* crc32c of its bytes; NULL: none is checked */
  const uint8_t* check;    /* whether to check it; NULL: all, where there is crc */
  const uint8_t* kind;     /* HW_JPEG...; NULL: all JPEG */
  const uint32_t* shape;   /* [n][3]: height, width, channels of raw ones; may be NULL where none is raw */
  const float* box;        /* [n][4]: left, top, width, height in the image; what is resized to the output */
  const uint8_t* flip;     /* HW_FLIP_HORIZONTAL | HW_FLIP_VERTICAL; NULL: none */
} hw_items;

/* Sums over a batch; times are thread time, so of two threads up to twice the wall. */
typedef struct {
  uint64_t ns_check;    /* checksums */
  uint64_t ns_decode;   /* entropy decoding, inverse DCT, colour */
  uint64_t ns_resample; /* resizing and writing */
  uint64_t bytes;       /* of the records */
  uint64_t bytes_used;  /* of them that were entropy-decoded */
  uint64_t pixels;      /* that were decoded */
  uint64_t direct;      /* images that our own decoder did; the rest went through libjpeg-turbo */
} hw_stats;

/* What the header of a file says. */
typedef struct {
  uint32_t width, height;
  uint32_t components;   /* 1, 3 or 4 */
  uint32_t progressive;
  uint32_t restart;      /* MCUs in a restart interval, 0: no markers */
  uint32_t mcu_width, mcu_height; /* in pixels */
  uint32_t orientation;  /* of EXIF, 1 where there is none */
} hw_info;

typedef struct hw_pool hw_pool;

HW_API uint32_t hw_abi(void);
HW_API const char* hw_features(void); /* such as "avx2, libjpeg-turbo 2.1.5" */
HW_API uint32_t hw_crc32c(const void* data, uint64_t length);

/* Threads that do the work, the caller among them: so threads - 1 are started. cpus may be NULL, else thread i (the
 * caller is none of them) runs on cpus[i % count] only. NULL where threads cannot be had. In a forked child the
 * pool starts its threads anew at the first call. */
HW_API hw_pool* hw_pool_create(int32_t threads, const int32_t* cpus, int32_t count);
HW_API void hw_pool_destroy(hw_pool*);

/* Decodes n images into out (uint8 [n, height, width, channels]; image i at out + i * stride). Returns how many have a
 * status other than HW_OK, or -1 where an argument is out of range. stats may be NULL; with it, stages are timed. */
HW_API int64_t hw_decode_batch(hw_pool*, int64_t n, const hw_items*, const hw_spec*, uint8_t* out, int64_t stride,
                               uint8_t* status, hw_stats* stats);

/* Copies n raw images of one shape, mirrored as flip says, and then moved by shift [n][2] (down, right; may be NULL)
 * with the border filled by reflection. kind is HW_RAW or HW_RAW_PLANAR. A record that is too short
 * is HW_UNDECODABLE. Result as above. */
HW_API int64_t hw_gather(hw_pool*, int64_t n, const uint64_t* address, const uint64_t* length, const uint32_t* crc,
                         const uint8_t* check, uint32_t kind, uint32_t height, uint32_t width, uint32_t channels,
                         const int16_t* shift, const uint8_t* flip, uint8_t* out, int64_t stride, uint8_t* status);

/* Guards a file that is mapped for reading, from its first page on. Where the file is cut while it is in use, or its
 * disk fails, a read of a lost page raises SIGBUS, which ends the process. Within a guarded range that page and all
 * after it become zeros instead, and hw_lost says so; any other fault goes to the handler that was there before.
 * Returns a ticket, or -1 where the range is none or memory cannot be had. */
HW_API int64_t hw_guard(uint64_t address, uint64_t length);
HW_API void hw_unguard(int64_t ticket); /* before the range is unmapped */
HW_API void hw_watch(void); /* before a batch is read: takes the signal back from a handler that was installed since */
HW_API int32_t hw_lost(int64_t ticket); /* whether it lost something; of -1: how many guarded ranges did */

/* HW_OK, HW_FOREIGN, or HW_UNDECODABLE. */
HW_API int32_t hw_probe(const void* data, uint64_t length, hw_info* info);

/* Rewrites a JPEG losslessly as baseline with optimised Huffman tables and restart markers. Returns the bytes written,
 * or minus the bytes needed where capacity is too small; 0: it cannot be, and reason (char[200]) says why. sound (may be
 * NULL) becomes 1 for a baseline file in perfect order, which every decoder decodes without a warning, else 0. */
HW_API int64_t hw_seekable(const void* data, uint64_t length, uint8_t* sound, void* out, uint64_t capacity,
                           char* reason);

/* Cuts out of a JPEG with restart markers a smaller one that holds the pixels of region (x0, y0, x1, y1; half open).
 * held receives the region of the original that the small one shows. Results as of hw_seekable. */
HW_API int64_t hw_splice(const void* data, uint64_t length, const int32_t region[4], int32_t held[4], void* out,
                         uint64_t capacity, char* reason);

/* How a step makes weights of gradients; the formulas are those of headway.optim. What is in `options`: */
enum {
  HW_LARS = 0,       /* momentum, weight_decay, eta, eps, nesterov, lr inside the buffer, clip */
  HW_LAMB = 1,       /* beta1, beta2, eps, weight_decay */
  HW_NOVOGRAD = 2,   /* beta1, beta2, eps, weight_decay, averaging */
  HW_SIGNUM = 3,     /* momentum, weight_decay, decoupled weight_decay */
  HW_FTML = 4,       /* beta1, beta2, eps, weight_decay */
  HW_TRANSITION = 5, /* momentum, beta2, eps, weight_decay, rate of RMSprop over lr, centre, period (in steps) */
  HW_LBSGD = 6       /* momentum, weight_decay, batch_scale, warm-up (0: linear, 1: power2, 2: sqrt, 3: lars), steps of
                        it, steps before the first */
};
enum { HW_FP32 = 0, HW_FP64 = 1, HW_BF16 = 2 /* with keys only */ };

/* Runs work(data) in so many threads at once, the caller among them: GOMP_parallel, of whoever's OpenMP it is. */
typedef void (*hw_team)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

/* One step over parameters that have the same options. Addresses are those of dense tensors, of the elements of a
 * parameter in the same order; an array that the rule does not use is NULL. */
typedef struct {
  uint32_t size; /* sizeof(hw_step) */
  uint32_t rule; /* HW_LARS... */
  uint32_t type; /* of weight, grad, first, second and norm; with keys first and second are bf16, and norm fp32 */
  uint32_t threads;
  int64_t n;
  const uint64_t* weight;
  const uint64_t* grad;
  const uint64_t* first;    /* momentum buffer or first moment; FTML: second moment. NULL: momentum is 0 */
  const uint64_t* second;   /* second moment; LBSGD: sum of gradients */
  const uint64_t* count;    /* of one fp32 a parameter: steps done; with keys every rule needs it */
  const uint64_t* norm;     /* of one number a parameter: NovoGrad's second moment */
  const int64_t* elements;
  const uint8_t* adapt;     /* LARS, LAMB: whether the parameter has a trust ratio */
  const double* options;
  const double* lr;
  const float* grad_scale;  /* gradients are divided by it; may be NULL */
  const float* found_inf;   /* where it is not 0, nothing is changed; may be NULL */
  hw_team team;             /* NULL: the caller does all */
  const uint64_t* key;      /* a number for each parameter: all bf16 arrays are rounded stochastically, with random bits
                               of (key, step, array, element). NULL: HW_FP32 or HW_FP64, and nothing is rounded */
} hw_step;

/* 0, or -1 where an argument is out of range or memory cannot be had; then nothing is changed. The result does not
 * depend on the threads. */
HW_API int32_t hw_optimize(const hw_step* step);

/* A convolution with a filter of 3x3 taps, stride 1 and zeros around the images, in fp32. Images are dense. */
typedef struct {
  uint32_t size; /* sizeof(hw_convolution) */
  uint32_t threads;
  int64_t n;
  int64_t height, width; /* of an input; an output has 2 * padding - 2 more */
  int64_t in_channels, out_channels;
  int64_t padding;        /* 0, 1 or 2 */
  int64_t tile;           /* side of the tiles, in outputs: 2 to 7; 0: what takes the least time */
  const float* input;     /* [n][height][width][in_channels] */
  const float* filter;    /* hw_convolve: [out][in][3][3], with the strides below */
  const float* bias;      /* hw_convolve: [out_channels]; may be NULL */
  float* output;          /* hw_convolve writes it; hw_convolve_filter reads the gradient of it */
  float* filter_gradient; /* hw_convolve_filter writes it, with the strides below */
  int64_t strides[4];     /* in elements; may be negative, as of a mirrored filter; they are not checked */
  hw_team team;           /* NULL: the caller does all */
} hw_convolution;

/* The convolution; with the filter mirrored, its channels swapped and padding 2 - p, the gradient of the input of one
 * with padding p. 0, or -1 where an argument is out of range or memory cannot be had. Results do not depend on the
 * threads. */
HW_API int32_t hw_convolve(const hw_convolution*);

/* The gradient of the filter. Result as above. */
HW_API int32_t hw_convolve_filter(const hw_convolution*);

#ifdef __cplusplus
}
#endif
#endif
