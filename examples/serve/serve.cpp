// Answers a request with a model that serve.py has packaged, without Python:
// `serve MODEL.pt2 REQUEST.pt RESULT.pt [repeats]`.
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc < 4) return std::cerr << "usage: serve MODEL.pt2 REQUEST.pt RESULT.pt [repeats]\n", 1;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const at::Device device(model.get_metadata().at("AOTI_DEVICE_KEY"));

  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue tensors = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> request;
  for (const c10::IValue& each : tensors.toListRef()) request.push_back(each.toTensor().to(device));
  const auto answer = [&] { return model.run(request)[0].cpu(); };

  at::Tensor result = answer();
  std::vector<double> microseconds;
  for (int k = argc > 4 ? std::stoi(argv[4]) : 0; k > 0; --k) {
    const auto start = std::chrono::steady_clock::now();
    result = answer();
    const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - start;
    microseconds.push_back(taken.count());
  }
  std::sort(microseconds.begin(), microseconds.end());
  if (!microseconds.empty()) std::cout << microseconds[microseconds.size() / 2] << std::endl;

  const std::vector<char> written = torch::jit::pickle_save(result);
  std::ofstream(argv[3], std::ios::binary).write(written.data(), written.size());
}
